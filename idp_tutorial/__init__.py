__version__ = "0.2.0"
__all__ = ['PromptClassifier', 'PromptRegressor']


def __getattr__(name):
    "The estimators, imported when they are asked for"
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .experiments import estimator
    return getattr(estimator, name)


def __dir__():
    return [*globals(), *__all__]
