"""Commands that serve checkpoints and measure them: run, evaluate, serve."""
