// The commit that the program was built from.
#pragma once

namespace flashgla::cli {

// "433ecbe", "433ecbe-dirty" with changes to tracked files; "unknown" outside a git checkout.
const char* source_commit();

}  // namespace flashgla::cli
