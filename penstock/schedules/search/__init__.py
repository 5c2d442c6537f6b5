"""Find a schedule: what is asked for as numbers, a first answer, a better one, the best one."""
