"""Fair and distributionally robust federated learning."""
