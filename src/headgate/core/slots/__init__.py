"""The rules of provider key slots: quotas, when to poll, when to wake."""
