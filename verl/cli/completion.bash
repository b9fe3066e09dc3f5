# SPDX-License-Identifier: Apache-2.0
# Lists the switches in the help of the command that is being typed.
_verl_switches() { "${COMP_WORDS[0]}" --help 2>/dev/null | grep -oE -- '--[a-z][a-z_-]*[a-z]' | sort -u; }
# Completes the commands that read no config: their switches, and files.
_verl_complete_plain() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$(_verl_switches)" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}
complete -o filenames -F _verl_complete_plain verl-{chat,examples,init,merge,tiny-model,view}
# Completes KEY=VALUE. bash gives `KEY`, `=` and `VALUE` as three words, zsh gives one.
_verl_complete() {
    local options=$1 switches=$2 values_of=$3 word=${COMP_WORDS[COMP_CWORD]} key= before=
    COMPREPLY=()
    if [[ $word == "=" ]]; then
        key=${COMP_WORDS[COMP_CWORD-1]} word=
    elif [[ $COMP_CWORD -gt 1 && ${COMP_WORDS[COMP_CWORD-1]} == "=" ]]; then
        key=${COMP_WORDS[COMP_CWORD-2]}
    elif [[ $word == *=* ]]; then
        key=${word%%=*} before=${word%%=*}= word=${word#*=}
    fi
    if [[ $key == config ]]; then
        COMPREPLY=($(compgen -P "$before" -f -X '!*.y*ml' -- "$word") $(compgen -P "$before" -S / -d -- "$word"))
    elif [[ $key == *_files || $key == *_path || $key == *format_prompt ]]; then
        COMPREPLY=($(compgen -P "$before" -f -- "$word"))
    elif [[ -n $key ]]; then
        COMPREPLY=($(compgen -P "$before" -W "$($values_of "$key")" -- "$word"))
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "${switches:-$(_verl_switches)}" -- "$word"))
    else
        # A section at a time: `worker.`, then `worker.rollout.`, then its options.
        local length=0
        [[ $word == *.* ]] && length=$(printf %s "${word%.*}." | wc -c)
        COMPREPLY=($(compgen -W "$options" -- "$word" | awk -v start="$length" '{
            dot = index(substr($0, start + 1), ".")
            print dot ? substr($0, 1, start + dot) : $0 "="
        }' | sort -u))
        compopt -o nospace 2>/dev/null
    fi
}
