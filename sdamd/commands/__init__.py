"""One command of the command line a module, loaded when it is the one that runs."""
