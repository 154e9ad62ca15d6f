"""What is told of tasks: webhooks, alerts, events and logs."""
