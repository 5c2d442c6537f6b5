"""Small recipes on text."""

NAMES = """
[model]
name = "translation_transformer"
num_layers = 1
ff_width = 24
num_heads = 2
width = 16
head_width = 8

[data]
name = "names"
languages = ["de", "nl", "uk"]
kinds = ["territories"]
low_resource = ["uk"]
low_resource_pairs = 9
vocabulary_size = 300
tokens_per_step = 2048
tokens_per_part = 1024
max_length = 40
beam = 2

[pipeline]
num_stages = 2
num_microbatches = 3

[optimizer]
name = "adafactor"
lr = 0.02

[learning_rate]
name = "inverse_sqrt"
warmup_steps = 4

[train]
epochs = 2
label_smoothing = 0.1
checkpoint_every = 3
keep_checkpoints = 99
average_checkpoints = 2
log_every = 1
"""
TEXT = """
[model]
name = "gpt"
num_layers = 2
width = 16
num_heads = 2

[data]
name = "text"
path = "PATH"
vocabulary_size = 300
length = 16
valid_share = 0.1
sample_length = 12

[pipeline]
num_stages = 2
num_microbatches = 2

[optimizer]
name = "adamw"
lr = 0.01

[train]
epochs = 2
batch_size = 24
average_decay = 0.9
log_every = 1
checkpoint_every = 99
"""
