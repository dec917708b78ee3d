from .method import Method as Method
from .method import MethodConfig as MethodConfig
from .registry import METHODS as METHODS
from .registry import register as register
