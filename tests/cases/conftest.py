"""What users of sharded training reported, each as the smallest call that shows it.

Left out here, with the reason:

| report                                            | why it is not here            |
|---------------------------------------------------|-------------------------------|
| a copy still runs when the reduction reads        | no streams on CPU; the GPU    |
| an alias declared wrongly frees a buffer early    | tests check stream order      |
| CUDA graph capture of the call                    |                               |
| the overlap option does not overlap               | tests/cuda/test_overlap.py    |
| several buffers and overlap in one run            | reads the compiled schedule   |
| ranks that do not use a leaf                      | needs several processes: see  |
| recompilation on one rank only                    | tests/multihost               |
| calls dropped or reordered on one rank only       |                               |
| schedules that differ between processes           |                               |
| a rank that stops calling; exit before the work   |                               |
| a call inside `lax.cond` on a value per rank      | any collective there hangs;   |
|                                                   | JAX does not let us see it    |
| a rank's element counts in the collective         | `lax` has equal counts only;  |
|                                                   | padding is tested instead     |
"""
