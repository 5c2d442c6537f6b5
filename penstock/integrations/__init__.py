"""Penstock with other libraries; each file imports the one that it is named after."""
