"""Any nn.Module cut into stages, by running its own forward with other stages' blocks left out.

capture                 the function `penstock.capture`
captured                a model as data: its block calls in order, and the values between them
source                  the same as layers, for all that follows
blocks                  which modules a cut may lie before; which of them stay on one stage
watch                   how calls of blocks reach the pass that is under way
events                  names for what happens between blocks, and for the values there
ghost                   a tensor without values: it stands for what another stage holds
forward_pass            one execution of the model's forward, operation by operation
recording               a pass that runs everything, and notes who gives and who uses what
replay                  a pass of one stage: it runs its own part, and is told the rest
operations              which of torch's operations draw, look at values, give new memory
containers              lists and dicts that blocks fill
inputs                  what a model is called with, and how that is routed to later stages
activation_checkpoints  checkpoints that the model puts around blocks
routes, stages          which stages hold a value; the model cut into stages, and their run
tied_weights            weights that several stages use
outer_state             what the model's code may not change outside blocks, nor seed
check                   is the cut model the model?
errors                  errors of code between blocks
"""
