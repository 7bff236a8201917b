"""The only loop over rounds, what it records, who is told, when it stops."""
