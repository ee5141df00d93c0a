"""All that compressed pages touch of transformers' continuous batching: subclasses, replaced methods, private names.

    release     which releases of transformers are known
    pool        pages and rings that fit into the free memory
    allocator   the blocks of a group of layers
    cache       the paged cache
    request     a request and the end of its answer
    scheduler   the order of waiting requests
    sampling    the logits processors of requests with options of their own
    inputs      the inputs of a step
    processor   the steps, one after another
    manager     the manager of a model

Other modules of `batching` know tensors, requests and blocks, and import nothing of transformers' continuous batching. Importing this
folder checks the installed release: it raises NotImplementedError for releases before `release.FIRST`, if a name is missing, or if an
overridden method has other parameters. `tests/batching/test_batching_contract.py` has a test for each touch.
"""

from .release import check_parameters, check_version, overridden, unsupported

check_version()
try:
    from .allocator import CompressedAllocator
    from .cache import CompressedPagedCache
    from .inputs import BatchInputs
    from .manager import CompressedManager
    from .processor import CompressedProcessor
    from .request import Request
    from .sampling import Sampling
except ImportError as error:
    if not (error.name or "").startswith("transformers"):
        raise
    raise unsupported(error) from error

OVERRIDDEN = overridden(CompressedManager, CompressedProcessor, BatchInputs, Request, Sampling, CompressedPagedCache, CompressedAllocator)
"""The methods of transformers that are overridden, and the parameters that they must have."""
check_parameters(OVERRIDDEN)
