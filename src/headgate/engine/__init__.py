"""The loops of a node: dispatch, run, settle, deliver webhooks, keep slots warm."""
