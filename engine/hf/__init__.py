"""Models in Hugging Face's layout, in and out: a folder of `config.json` and safetensors shards.

Reading order: `config` says a shape as Llama's or Qwen3's configuration and back, `names` what each tensor is called
there, `shards` holds the files, `export` and `load` are the two directions. Nothing is ever unpickled.
"""

from engine.hf.export import export_hugging_face as export_hugging_face
from engine.hf.load import import_hugging_face as import_hugging_face
