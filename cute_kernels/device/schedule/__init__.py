"""Finds on the device which CTA works on what."""
