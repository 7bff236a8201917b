"""How long the steps are, and how far from the optimum a model is."""
