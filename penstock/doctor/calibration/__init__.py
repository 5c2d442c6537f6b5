"""HOW FAST IS THIS MACHINE: a description of its devices and links, measured in under a minute."""

from .calibrate import Calibration, calibrate
from .figures import Figure

__all__ = ["Calibration", "Figure", "calibrate"]
