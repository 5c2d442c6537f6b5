"""All that is to be known of a card, in the minutes that there is one."""
