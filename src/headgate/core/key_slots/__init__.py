"""Key slots: quotas of provider keys, and the wakes that open their windows."""
