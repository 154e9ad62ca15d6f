"""The pure core: decisions and arithmetic, as functions of a snapshot and `now`."""
