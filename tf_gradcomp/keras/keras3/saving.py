"""Has Keras 3 write files as workers of a job can."""

from tf_gradcomp.keras.common import files
from tf_gradcomp.keras.keras3 import backups as _backups  # noqa: F401 (has backups be complete)
from tf_gradcomp.keras.keras3 import keras_private

keras_private.on_save(files.save, files.leaves_out_optimizer)
keras_private.on_epochs(files.release, files.collect_at_epoch_end)
keras_private.on_logs(files.log_path)
keras_private.on_broken_file(files.advice_on_broken)
