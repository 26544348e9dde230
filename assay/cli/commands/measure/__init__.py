"""Commands that serve checkpoints and measure them: serve, evaluate."""
