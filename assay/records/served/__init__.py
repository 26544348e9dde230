"""What replies say of their serving."""
