"""What can be seen of a service that runs: lists, reasons, figures over time."""
