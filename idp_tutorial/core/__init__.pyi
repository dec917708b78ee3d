from .backbone import Backbone as Backbone
from .context import INPUT as INPUT
from .context import Context as Context
from .heads import (
    ClassificationHead as ClassificationHead,
)
from .heads import (
    GenerationHead as GenerationHead,
)
from .heads import (
    VerbalizerHead as VerbalizerHead,
)
from .loop import run_layers as run_layers
from .loop import walk_layers as walk_layers
from .prompted_model import PromptedModel as PromptedModel
from .prompted_model import count_parameters as count_parameters
from .steps import (
    Add as Add,
)
from .steps import (
    Insert as Insert,
)
from .steps import (
    KeyValue as KeyValue,
)
from .steps import (
    Plan as Plan,
)
from .steps import PromptSource as PromptSource
from .steps import (
    Replace as Replace,
)
