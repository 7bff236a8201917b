"""What the experiments share: how one is defined, run, measured, drawn and written down."""
