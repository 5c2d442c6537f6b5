"""Calibrate: describe this machine's devices and links, measured in under a minute."""

from .calibrate import Calibration, calibrate
from .figures import Figure

__all__ = ["Calibration", "Figure", "calibrate"]
