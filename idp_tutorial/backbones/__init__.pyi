from .load import load_backbone as load_backbone
