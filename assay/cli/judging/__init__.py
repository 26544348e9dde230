"""What a verdict needs beside the measurements of its run: attempts that were judged before."""
