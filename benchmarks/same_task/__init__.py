"""The same task in equifed, Flower, fluke, and scikit-learn with fairlearn."""
