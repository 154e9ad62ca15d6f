"""What answers to the routes, subject by subject."""
