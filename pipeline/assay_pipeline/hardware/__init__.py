"""What plans and rows of speed say of a machine: what fits, the least time a token takes, hours of making."""
