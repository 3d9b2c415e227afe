#include "flashgla/text/tokenizer.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flashgla::python {
namespace {

// Text of Python as UTF-8: a str (lone surrogates become U+FFFD), or bytes as they are.
std::string utf8_of(nb::handle text) {
  if (PyBytes_Check(text.ptr()))
    return {PyBytes_AS_STRING(text.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(text.ptr()))};
  if (!PyUnicode_Check(text.ptr())) {
    throw nb::type_error(
        ("encode: text is of type " + std::string(Py_TYPE(text.ptr())->tp_name) + "; expected str or bytes").c_str());
  }
  Py_ssize_t size = 0;
  if (const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size)) return {data, static_cast<std::size_t>(size)};
  PyErr_Clear();
  const nb::bytes encoded = nb::cast<nb::bytes>(text.attr("encode")("utf-8", "surrogatepass"));
  return {encoded.c_str(), encoded.size()};
}

text::TokenIds encode(const text::Tokenizer& tokenizer, nb::handle text, bool add_special_tokens) {
  const std::string utf8 = utf8_of(text);
  const nb::gil_scoped_release released;
  text::TokenIds ids;
  if (add_special_tokens && tokenizer.adds_bos()) ids.push_back(tokenizer.bos_id());
  const text::TokenIds body = tokenizer.encode(utf8);
  ids.insert(ids.end(), body.begin(), body.end());
  if (add_special_tokens && tokenizer.adds_eos()) ids.push_back(tokenizer.eos_id());
  return ids;
}

nb::object id_or_none(std::int32_t id) { return id < 0 ? nb::none() : nb::cast(id); }

}  // namespace

void bind_tokenizer(nb::module_& m) {
  nb::class_<text::Tokenizer>(m, "Tokenizer",
                              "Text to ids and back: bytes, SentencePiece models and Hugging Face's tokenizer.json.")
      .def_static(
          "load",
          [](const std::string& path) {
            const nb::gil_scoped_release released;
            return std::shared_ptr<text::Tokenizer>(text::load_tokenizer(path));
          },
          "path"_a, "From a tokenizer's file, or a folder that holds one. Raises ValueError naming the file.")
      .def_prop_ro("kind", &text::Tokenizer::kind, "byte, sentencepiece or huggingface")
      .def_prop_ro("vocab_size", &text::Tokenizer::vocab_size, "ids are 0 .. vocab_size - 1")
      .def_prop_ro(
          "bos_id", [](const text::Tokenizer& t) { return id_or_none(t.bos_id()); },
          "the token that begins a text, or None")
      .def_prop_ro(
          "eos_id", [](const text::Tokenizer& t) { return id_or_none(t.eos_id()); },
          "the token that ends a text, or None")
      .def_prop_ro("adds_bos", &text::Tokenizer::adds_bos, "whether add_special_tokens puts bos before a text")
      .def_prop_ro("adds_eos", &text::Tokenizer::adds_eos, "whether add_special_tokens puts eos after a text")
      .def_prop_ro("fingerprint", &text::Tokenizer::fingerprint, "16 hexadecimal digits that tell tokenizers apart")
      .def("encode", &encode, "text"_a, "add_special_tokens"_a = false,
           "The ids of a text (str, or bytes of UTF-8), with bos and eos as the tokenizer adds them if asked for.")
      .def(
          "decode",
          [](const text::Tokenizer& tokenizer, const text::TokenIds& ids) {
            std::string text;
            {
              const nb::gil_scoped_release released;
              text::StreamDecoder decoder(tokenizer);
              for (const std::int32_t id : ids) text += decoder.push(id);
              text += decoder.finish();
            }
            return text;
          },
          "ids"_a, "The text of ids. Special tokens are no text; bytes that are no UTF-8 become U+FFFD.")
      .def("save", &text::Tokenizer::save, "folder"_a, "Writes the tokenizer's files into a folder.");
}

}  // namespace flashgla::python
