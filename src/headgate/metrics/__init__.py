"""What a node shows to Prometheus, subject by subject."""
