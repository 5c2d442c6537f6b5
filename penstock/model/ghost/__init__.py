"""Any nn.Module cut into stages, by running its own forward with other stages' blocks left out.

values        what an operation is called, and what is known of a tensor without its values
ghost         a tensor without values: it stands for what another stage holds
faults        errors of code between blocks
passes        one execution of the model's forward, operation by operation
record        a pass that runs everything, and notes who gives and who uses what
replay        a pass of one stage: it runs its own part, and is told the rest
blocks        which modules a cut may lie before; groups of them that stay on one stage
checkpoints   activation checkpoints that the model puts around blocks
draws         operations that draw random numbers
routes        which stages hold a value
record_model  the model as data
describe      the same as a table
cut           the model cut into stages
tied          weights that several stages use
layers        a captured model as layers, for all that follows
make          values for a model that was built without any
state         what the model's code may not change outside blocks
writes        what it may not write while it runs, nor seed
prove         is the cut model the model?  proven: not asked twice
exported      the fallback: graphs of torch.export in place of the model's own Python
"""
