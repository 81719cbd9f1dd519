"""Who works on what, found on the device."""
