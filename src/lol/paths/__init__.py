"""Reading and changing paths: record what every window did, force blocks, draw the report."""
