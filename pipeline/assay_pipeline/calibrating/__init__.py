"""What commands share that use text: its sources, layers that are calibrated before they are written, and what is shown."""
