"""Any nn.Module cut into stages, by running its own forward with other stages' blocks left out.

values      what an operation is called, and what is known of a tensor without its values
ghost       a tensor without values: it stands for what another stage holds
passes      one execution of the model's forward, operation by operation
record      a pass that runs everything, and notes who gives and who uses what
replay      a pass of one stage: it runs its own part, and is told the rest
blocks      which modules a cut may lie before
checkpoints activation checkpoints that the model puts around blocks
draws       operations that draw random numbers
routes      which stages hold a value
capture     the model as data
cut         the model cut into stages
tied        weights that several stages use
layers      a captured model as layers, for all that follows
state       what the model's code may not change outside blocks

Not behind `Pipeline(model)` yet: a review found models that were silently wrong.  Those are
refused now or right, but the check of a new capture against the unsplit model is not written.
"""
