"""What `gds_optimizer.probe` is made of; import that instead.

`report` holds the results, `system` reads what the kernel says, `children` runs the round trips in
processes of their own, and `child` (with `device_trip`) is the program those processes run.
Nothing is imported here, so that the child starts without torch.
"""
