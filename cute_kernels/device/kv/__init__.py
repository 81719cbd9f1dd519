"""Where tokens lie and what their bytes mean."""
