from .build import build_model as build_model
from .config import RunConfig as RunConfig
