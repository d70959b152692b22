"""The desktop UI: Gradio widgets only; every rule and limit comes from `sdamd`."""
