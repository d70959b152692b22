__version__ = '2.9.1+rocm6.4'
hip: Optional[str] = '6.4.43484-123eb5128'
cuda: Optional[str] = None
