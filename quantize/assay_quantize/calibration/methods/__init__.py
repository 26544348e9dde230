"""What llm-compressor's modifiers do with one decoder layer (`method.py`), and what is ours of AutoRound (`autoround.py`)."""
