// The extension flashgla._models: tokenizers and language models. It is apart from flashgla._flashgla, so that the
// operators load none of the libraries behind it.
#include <nanobind/nanobind.h>

#include "../errors.h"
#include "bindings.h"

namespace nb = nanobind;

NB_MODULE(_models, m) {
  m.doc() = "Tokenizers and language models. flashgla.LanguageModel and flashgla.Tokenizer are the public face.";
  flashgla::python::translate_errors();
  flashgla::python::bind_tokenizer(m);
  flashgla::python::bind_language_model(m);
}
