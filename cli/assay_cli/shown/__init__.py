"""Records as the terminal shows them."""
