# SPDX-License-Identifier: Apache-2.0
from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported: some of these modules are programs too
