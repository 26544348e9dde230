"""Commands about this installation: doctor, recipes, family."""
