"""Without lm-eval, which `pip install 'qkvcache[dev]'` brings, what is about it is left out."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("lm_eval") else ["test_model.py", "test_lm_eval.py", "test_ranks.py", "asked.py"]
