from .all_methods import METHODS as METHODS
from .all_methods import register as register
from .method_registry import Method as Method
from .method_registry import MethodConfig as MethodConfig
