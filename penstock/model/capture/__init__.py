"""Split any nn.Module into stages: each stage runs the model's forward with its own blocks only.

capture                 the function `penstock.capture`
captured                a model as data: its block calls in order, and the values between them
source                  the captured model as layers
blocks                  the choice of blocks, and of blocks that stay on one stage
watch                   routes calls of blocks to the current pass
events                  names of the operations between blocks, and of their values
ghost                   a tensor without values, in the place of one that another stage holds
forward_pass            one execution of the model's forward, operation by operation
recording               a pass that runs everything, and records producers and users of values
replay                  a pass of one stage: it runs its part, and reads the rest from a header
operations              torch's operations that draw, look at values or return new memory
containers              lists and dicts that blocks fill
inputs                  the model's arguments, and their route to later stages
activation_checkpoints  checkpoints that the model puts around blocks
routes, stages          the stages that hold a value; the stages of a model, and their execution
tied_weights            weights that several stages use
outer_state             refuses state and seeds that the model changes outside blocks
check                   compares the stages with the unsplit model
errors                  errors of code between blocks
"""
