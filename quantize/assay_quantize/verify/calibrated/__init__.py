"""What is known of weights that text decided: their layers' digests, and how far they are from the source."""
